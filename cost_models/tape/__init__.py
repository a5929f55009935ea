"""A step of training computed on shapes alone: which op reads and makes which memory."""
