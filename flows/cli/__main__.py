"""`python -m flows.cli` is the `fp8-grpo` command."""

import sys

from flows.cli import main

sys.exit(main())
