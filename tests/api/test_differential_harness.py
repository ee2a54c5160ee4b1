"""The comparison of drawn steps sees what it is there for: each fault is put in and found."""
