"""Make the cost model's tables again, or measure them: `python -m jaxoverlap.calibrate`."""
