"""`python -m kvpd`: the same as the `kvpd` command."""

from __future__ import annotations

from kvpd.cli import main

if __name__ == "__main__":
    main(prog_name="kvpd")
