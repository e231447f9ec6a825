"""Machine and project in one table, each line with a remark where something does not fit."""
