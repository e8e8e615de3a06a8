"""Errors that are a user's to mend: printed as one message, without a traceback."""


class UserError(Exception):
    """Something about the job (data, checkpoint, launch) that has to be changed by its user."""


class DataError(UserError):
    """A data file that is missing, damaged, or doesn't fit the model."""


class CheckpointError(UserError):
    """A checkpoint that can't be used, or can't be written."""


class ConvertError(UserError):
    """A model that can't be moved to or from Hugging Face's format."""
