"""The command ``verl-p40``: one module a command group, no logic of its own."""
