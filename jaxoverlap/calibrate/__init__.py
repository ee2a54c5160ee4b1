"""The cost model's tables, made again or measured: `python -m jaxoverlap.calibrate`."""
