"""Pipeline parallelism in one program: schedules as data, and their execution in JAX."""
