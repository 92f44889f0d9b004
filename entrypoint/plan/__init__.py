"""Pure decisions: machine, job and settings give a plan, each decision with its reason."""
