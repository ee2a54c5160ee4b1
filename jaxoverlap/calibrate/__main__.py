"""The command: `python -m jaxoverlap.calibrate`."""

from jaxoverlap.calibrate.calibrate import main

if __name__ == "__main__":
    main()
