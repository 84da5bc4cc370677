"""The steps of a run, from conversations to an exported head: functions of a `Run`, one module for each.

    distill → data → (features) → train → evaluate → export
    runs/NAME/{data, features, checkpoints, head, report.json, report.md, export}

Every command calls some of them; `headstart run` (commands/run.py) calls all. `run.py` holds what they share,
`markers.py` which of them are done, `inputs.py` what each depends on.
"""
