"""``python -m slime.cli COMMAND ...``, where no ``slime`` is on the path."""

from slime.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
