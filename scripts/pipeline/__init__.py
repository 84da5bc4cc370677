"""The steps of a run, one module each: distill → data → features → train → evaluate → export."""
