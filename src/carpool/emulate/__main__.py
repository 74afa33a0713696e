"""`python -m carpool.emulate`: one worker of a job on emulated GPUs."""

import sys

from carpool.emulate.worker import main

sys.exit(main())
