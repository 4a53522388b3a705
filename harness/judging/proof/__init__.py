"""What injectors use to prove that their fault was felt. Pure: events come in, `Evidence` or None goes out."""
