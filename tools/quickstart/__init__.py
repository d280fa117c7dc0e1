"""The quickstart: phases, progress on the screen, figures and the report. Run by scripts/quickstart.sh."""
