"""From an nn.Module to a Graph, by torch.export."""
