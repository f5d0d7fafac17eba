"""What has to be installed: torch, which nothing here works without."""

import sys
from pathlib import Path

_MISSING = "PyTorch is not installed, and kronfac needs it: pip install torch."

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    if Path(sys.argv[0]).name == "kronfac":  # the command: one sentence and no traceback
        print(f"kronfac: error: {_MISSING}", file=sys.stderr)
        raise SystemExit(2) from None
    raise ModuleNotFoundError(_MISSING, name="torch") from None
