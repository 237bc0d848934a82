"""Its being here puts this folder on the import path, so that tests can say `from spawn import run_ranks`."""
