"""Pictures of finished runs: one self-contained HTML page, and PNGs."""

from kronfac.report.page.write import write

__all__ = ["write"]
