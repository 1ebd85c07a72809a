"""The passes, one file each; `archir.pipeline` puts them in order."""
