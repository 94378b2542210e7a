"""`python -m rewake`."""

from rewake.cli import main

raise SystemExit(main())
