"""Random well-typed modules and the laws every module must obey."""
