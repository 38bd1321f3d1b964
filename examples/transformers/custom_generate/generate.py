"""Push this folder to a hub repository: ``model.generate(**inputs, custom_generate="org/name", trust_remote_code=True,
assistant_model=draft, method="sprinter")`` then decodes with Sprinter."""

from sprinter.doors.transformers import hub_generate as generate

__all__ = ["generate"]
