"""``python -m kronfac`` is the ``kronfac`` command."""

import sys

from kronfac.cli import main

sys.exit(main())
