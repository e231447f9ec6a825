# Moved to preflight/__main__.py in 0.4.0. Python imports the folder preflight/ in its place, and does not read this
# file: it is here for one release, so that an edit in the old one is a conflict that you see, and not gone.
