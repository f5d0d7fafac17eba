"""The ``torch.optim.Optimizer`` that users hold, whatever the method."""
