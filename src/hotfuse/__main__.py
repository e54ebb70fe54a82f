"""`python -m hotfuse` is the `hotfuse` command, for environments whose scripts are not on the path."""

from hotfuse.cli import main

if __name__ == "__main__":
    main()
