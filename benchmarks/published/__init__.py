"""What others measured, read from files of published rows, and what the cost model predicts."""
