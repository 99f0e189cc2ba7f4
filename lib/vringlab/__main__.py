"""`python -m vringlab`."""

from vringlab.cli import main

if __name__ == "__main__":
    main()
