"""Case lists, error measures and process launchers, shared by tests, benchmarks and users."""
