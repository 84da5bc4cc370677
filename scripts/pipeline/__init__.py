"""The steps of a run, from conversations to an exported head. Each step is a function of a `Run` in its own module.

    distill → data → (features) → train → (quality) → evaluate → export
    runs/NAME/{data, features, checkpoints, head, quality.json, report.json, report.html, report.md, export}

`headstart run` (commands/run.py) calls all steps, other commands call some. `run.py` holds what the steps share,
`markers.py` says which are done, `inputs.py` says what each depends on.
"""
