"""The report on a run, whether it is alive, finished or dead (`lastgood report`, docs/report.md). Not to be mixed up
with `observe/report.py`, the text that a run that was stopped leaves for the person who has to mend it."""
