"""What every command needs: options, the target, output, errors with exit codes, Ctrl-C."""
