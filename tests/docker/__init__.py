"""The files of docker/: valid for their tools, and their commands run here."""
