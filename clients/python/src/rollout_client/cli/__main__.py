"""`python -m rollout_client.cli`, if the script `rollout` is not in PATH."""

import sys

from . import main

sys.exit(main())
