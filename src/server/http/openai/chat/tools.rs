//! The tools of a chat: their names, and whether the model may, must not or must call one.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::{Error, Result, shown};
use crate::text::ToolFormat;

/// Longest part of a client's text in an error.
const MAX_SHOWN: usize = 128;

/// How calls of tools are found in a sample's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Calling {
    /// There are none: the text is the content.
    Never,
    /// They are in the text, in this format, beside the content. The names are those of the tools.
    Auto { format: ToolFormat, names: Vec<String> },
}

/// A tool that the request offers.
#[derive(Deserialize)]
struct Tool {
    function: Function,
}

#[derive(Deserialize)]
struct Function {
    name: String,
}

/// What `tool_choice` asks for.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    None,
    Auto,
    /// Any of the tools must be called.
    Required,
    /// This one must be called.
    Named(String),
}

impl Calling {
    /// What the members `tools` and `tool_choice` of a body ask of a model that writes calls in `format`.
    ///
    /// # Errors
    /// `InvalidArgument` with the member that is wrong.
    pub(super) fn new(tools: Option<&RawValue>, choice: Option<&RawValue>, format: Option<ToolFormat>) -> Result<Self> {
        let names = tools.map(names).transpose()?.unwrap_or_default();
        let choice = choice.map(Choice::read).transpose()?.unwrap_or(Choice::Auto);
        if names.is_empty() && !matches!(choice, Choice::None | Choice::Auto) {
            return Err(Error::invalid("tool_choice", "asks for a call, and there are no tools; send tools"));
        }
        match choice {
            Choice::None => Ok(Self::Never),
            Choice::Auto => {
                Ok(format.filter(|_| !names.is_empty()).map_or(Self::Never, |format| Self::Auto { format, names }))
            }
            Choice::Named(name) if !names.contains(&name) => {
                let message = format!("{:?} is not among the tools", shown(&name, MAX_SHOWN));
                Err(Error::invalid("tool_choice", message))
            }
            Choice::Required | Choice::Named(_) => {
                Err(Error::invalid("tool_choice", "a forced call is not supported; send auto or none"))
            }
        }
    }

    /// Bytes on the heap that the names take.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Never => 0,
            Self::Auto { names, .. } => names.iter().map(|name| name.len() + size_of::<String>()).sum(),
        }
    }
}

impl Choice {
    fn read(given: &RawValue) -> Result<Self> {
        #[derive(Deserialize)]
        struct Named {
            function: Function,
        }
        match given.get() {
            "\"none\"" => Ok(Self::None),
            "\"auto\"" => Ok(Self::Auto),
            "\"required\"" => Ok(Self::Required),
            text => match serde_json::from_str::<Named>(text) {
                Ok(named) => Ok(Self::Named(named.function.name)),
                Err(_) => {
                    let message = format!(
                        "{} is none of \"none\", \"auto\", \"required\" and {{\"type\": \"function\", \"function\": \
                         {{\"name\": ...}}}}",
                        shown(text, MAX_SHOWN)
                    );
                    Err(Error::invalid("tool_choice", message))
                }
            },
        }
    }
}

/// The names of the tools.
fn names(tools: &RawValue) -> Result<Vec<String>> {
    let mut json = serde_json::Deserializer::from_str(tools.get());
    let tools: Vec<Tool> = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = shown(&error.path().to_string(), MAX_SHOWN);
        let path = if path == "." { "tools".to_owned() } else { format!("tools{path}") };
        Error::invalid(path, error.into_inner().to_string())
    })?;
    Ok(tools.into_iter().map(|tool| tool.function.name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: &str =
        r#"[{"type": "function", "function": {"name": "add", "parameters": {"a": [1]}}}, {"function": {"name": "f"}}]"#;

    fn calling(tools: &str, choice: &str) -> Result<Calling> {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).expect("is JSON");
        let given = |text: &str| (!text.is_empty()).then(|| raw(text));
        Calling::new(given(tools).as_deref(), given(choice).as_deref(), Some(ToolFormat::Hermes))
    }

    #[test]
    fn each_choice_has_its_meaning() {
        let auto = Calling::Auto { format: ToolFormat::Hermes, names: vec!["add".into(), "f".into()] };
        for (tools, choice, expected) in [
            ("", "", Calling::Never),
            ("[]", "\"auto\"", Calling::Never),
            ("", "\"none\"", Calling::Never),
            (TOOLS, "\"none\"", Calling::Never),
            (TOOLS, "\"auto\"", auto.clone()),
            (TOOLS, "", auto),
        ] {
            assert_eq!(calling(tools, choice).expect("valid"), expected, "{tools} {choice}");
        }
        let tools = RawValue::from_string(TOOLS.into()).expect("is JSON");
        assert_eq!(Calling::new(Some(&tools), None, None).expect("valid"), Calling::Never);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let named = |name: &str| format!(r#"{{"type": "function", "function": {{"name": "{name}"}}}}"#);
        for (tools, choice, member, says) in [
            (TOOLS, "\"any\"", "tool_choice", "is none of"),
            (TOOLS, "5", "tool_choice", "is none of"),
            (TOOLS, "{}", "tool_choice", "is none of"),
            (TOOLS, &named("sub"), "tool_choice", "\"sub\" is not among"),
            ("", "\"required\"", "tool_choice", "no tools"),
            ("[]", &named("add"), "tool_choice", "no tools"),
            ("{}", "", "tools", "invalid type"),
            ("[{\"function\": {}}]", "", "tools[0].function", "missing field `name`"),
            ("[{\"function\": {\"name\": 3}}]", "", "tools[0].function.name", "invalid type"),
        ] {
            match calling(tools, choice) {
                Err(Error::InvalidArgument { field, message }) => {
                    assert_eq!(field, member, "{tools} {choice}");
                    assert!(message.contains(says), "{tools} {choice}: {message}");
                }
                other => panic!("{tools} {choice}: {other:?}"),
            }
        }
    }
}
