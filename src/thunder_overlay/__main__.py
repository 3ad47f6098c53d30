"""``python -m thunder_overlay``: prints the status of the overlay; exit status 1 when it is not active."""

import sys

from thunder_overlay.status import main

sys.exit(main())
