"""`python -m jaxoverlap`: the command, where its script is not on the PATH."""

from jaxoverlap.cli import main

if __name__ == "__main__":
    main()
