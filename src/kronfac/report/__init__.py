"""Pictures of finished runs: one self-contained HTML page, and PNGs."""

from kronfac.report.write import write

__all__ = ["write"]
