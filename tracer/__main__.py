"""`python -m lifetrace` is the command `lifetrace`."""

from lifetrace.cli import main

if __name__ == "__main__":
    main()
