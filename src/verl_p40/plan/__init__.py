"""How much memory a run will need, phase by phase, before it is started."""
