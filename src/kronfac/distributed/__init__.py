"""How the work of a step is shared out over ranks. Nothing here knows an inverse or a layer type."""
