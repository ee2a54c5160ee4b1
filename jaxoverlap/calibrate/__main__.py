"""The command: `python -m jaxoverlap.calibrate`."""

from jaxoverlap.calibrate.calibrate import main

main()
