"""`python -m headstart …` is `headstart …`."""

from headstart.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
