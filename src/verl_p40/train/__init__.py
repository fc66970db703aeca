"""Training under a supervisor: presets, the resolved config, the run folder, the live view."""
