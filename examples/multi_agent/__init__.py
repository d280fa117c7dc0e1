"""Several roles of one model work on one problem: solvers, rewriters, a selector."""
