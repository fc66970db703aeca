"""The smoke test: does this machine, driver and stack do what a training run needs?

``catalog`` lists the checks from cheap to dear, ``run`` runs each in a process of its own,
``report`` writes the file that can be attached to an issue, ``privacy`` keeps people out of it.
The modules of the checks themselves are imported only in their own process (``child``).
"""
