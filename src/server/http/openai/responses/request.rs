//! The body, as that of a chat.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::input::ResponseInput;
use crate::error::{Error, Result, shown};
use crate::server::http::members;
use crate::server::http::openai::chat::{
    ChatMessage, ChatPrompt, ChatRequest, ChatTool, named_tool, raw, reasoning_variables, schema_format, typed,
};
use crate::server::http::openai::sampling::Sampling;

/// Longest part of a client's text in an error.
const MAX_SHOWN: usize = 128;
/// The value of `include` that asks for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

members! {
    /// The body. The members that say how to sample are those of a chat.
    pub(in crate::server::http) struct ResponseRequest {
        /// A text, or a list of items: messages, calls of functions (`function_call`), their outputs
        /// (`function_call_output`), and reasoning. A message of the assistant at the end whose `status` is
        /// `in_progress` or `incomplete` is continued.
        input: ResponseInput,
        /// The first message of the system.
        instructions: String,
        /// Maximum tokens of the response (default: the rest of the context).
        max_output_tokens: u32,
        /// Functions that the model may call: objects of the type `function`, with name, description and parameters.
        #[schema(value_type = Option<Vec<serde_json::Value>>)]
        tools: Box<RawValue>,
        /// Whether the model may call a function: `auto`, `none`, `required`, or an object that names one (default:
        /// auto).
        #[schema(value_type = Option<serde_json::Value>)]
        tool_choice: Box<RawValue>,
        /// Whether a response may have more than one call; with false, it has the first alone (default: true).
        parallel_tool_calls: bool,
        /// The form of the text: an object whose `format` is `text`, `json_object`, or `json_schema` with a schema.
        #[schema(value_type = Option<serde_json::Value>)]
        text: Box<RawValue>,
        /// How much the model is to reason: an object whose `effort` is a variable of the chat template.
        #[schema(value_type = Option<serde_json::Value>)]
        reasoning: Box<RawValue>,
        /// Whether the response has the model's reasoning (default: true).
        include_reasoning: bool,
        /// Further contents of the response. They have no effect; log-probabilities are refused.
        include: Vec<String>,
        /// An object that the response repeats.
        #[schema(value_type = Option<serde_json::Value>)]
        metadata: Box<RawValue>,
        /// Has no effect: nothing is stored.
        store: bool,
        /// Only null: nothing is stored, so `input` needs the earlier items too.
        previous_response_id: String,
        /// Only false: nothing is stored.
        background: bool,
        /// Only `disabled`, the default: an input that is too long is refused.
        truncation: String,
        /// Further variables of the chat template.
        #[schema(value_type = Option<serde_json::Value>)]
        chat_template_kwargs: Box<RawValue>,
        ..sampling: Sampling,
    } rejects ["conversation", "enable_response_messages", "max_tool_calls", "previous_input_messages", "prompt",
        "top_logprobs"];
}

/// Members of the body that the response repeats.
#[derive(Serialize, ToSchema)]
pub(super) struct Echo {
    instructions: Option<String>,
    #[schema(value_type = Option<serde_json::Value>)]
    metadata: Option<Box<RawValue>>,
    parallel_tool_calls: bool,
    temperature: f32,
    #[schema(value_type = serde_json::Value)]
    tool_choice: Box<RawValue>,
    #[schema(value_type = Vec<serde_json::Value>)]
    tools: Box<RawValue>,
    top_p: f32,
    max_output_tokens: Option<u32>,
    #[schema(value_type = Option<serde_json::Value>)]
    reasoning: Option<Box<RawValue>>,
    #[schema(value_type = Option<serde_json::Value>)]
    text: Option<Box<RawValue>>,
    presence_penalty: f32,
    frequency_penalty: f32,
}

#[derive(Deserialize)]
struct ResponseTool {
    r#type: String,
    name: Option<String>,
    description: Option<String>,
    parameters: Option<Box<RawValue>>,
}

/// The function that `tool_choice` names.
#[derive(Deserialize)]
struct NamedFunction {
    name: String,
}

#[derive(Deserialize)]
struct TextConfig {
    format: Option<TextFormat>,
}

#[derive(Deserialize)]
struct TextFormat {
    r#type: String,
    schema: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

impl ResponseRequest {
    /// Members that were given and have no effect.
    pub(super) fn without_effect(&self) -> impl Iterator<Item = &'static str> {
        let members = [
            ("store", self.store == Some(true)),
            ("include", self.include.as_ref().is_some_and(|include| !include.is_empty())),
        ];
        members.into_iter().filter(|(_, is_given)| *is_given).map(|(name, _)| name)
    }

    /// The body of the chat, and the members that the response repeats.
    ///
    /// # Errors
    /// `InvalidArgument` for members whose values only this body has. Everything else is checked when the chat is.
    pub(super) fn into_chat(self) -> Result<(ChatRequest, Echo)> {
        self.check_is_stateless()?;
        self.sampling.check_is_plain()?;
        let mut messages = Vec::new();
        messages.extend(self.instructions.clone().map(|text| ChatMessage::new("system", vec![text.into()])));
        let input = self.input.ok_or_else(|| Error::invalid("input", "is missing; give a text, or a list of items"))?;
        let continues = input.ends_unfinished();
        input.append_to(&mut messages)?;
        let mut sampling = self.sampling;
        let text = self.text.as_deref().map(|text| typed::<TextConfig>("text", text)).transpose()?;
        if let Some(format) = text.and_then(|text| text.format).map(response_format).transpose()?
            && sampling.response_format.replace(format).is_some()
        {
            return Err(Error::invalid("response_format", "cannot be combined with text.format; send one of them"));
        }
        let reasoning = self.reasoning.as_deref().map(|given| typed::<Reasoning>("reasoning", given)).transpose()?;
        let effort = reasoning.and_then(|reasoning| reasoning.effort);
        let tools = self.tools.as_deref().map(functions).transpose()?.filter(|tools| !tools.is_empty());
        let tool_choice = self.tool_choice.as_deref().map(choice).transpose()?;
        let prompt = ChatPrompt {
            messages: Some(raw(&messages)?.into()),
            tools: tools.as_ref().map(raw).transpose()?,
            continue_final_message: Some(continues),
            chat_template_kwargs: reasoning_variables(self.chat_template_kwargs, effort.as_deref(), None)?,
            ..ChatPrompt::default()
        };
        let echo = Echo {
            instructions: self.instructions,
            metadata: self.metadata,
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            temperature: sampling.temperature.unwrap_or(1.0),
            tool_choice: self.tool_choice.map_or_else(|| raw(&"auto"), Ok)?,
            tools: self.tools.map_or_else(|| raw(&json!([])), Ok)?,
            top_p: sampling.top_p.unwrap_or(1.0),
            max_output_tokens: self.max_output_tokens,
            reasoning: self.reasoning,
            text: self.text,
            presence_penalty: sampling.presence_penalty.unwrap_or(0.0),
            frequency_penalty: sampling.frequency_penalty.unwrap_or(0.0),
        };
        let tool_choice = tool_choice.as_ref().map(raw).transpose()?;
        let chat = ChatRequest {
            max_completion_tokens: self.max_output_tokens,
            tool_choice,
            include_reasoning: self.include_reasoning,
            parallel_tool_calls: self.parallel_tool_calls,
            prompt,
            sampling,
            ..ChatRequest::default()
        };
        Ok((chat, echo))
    }

    fn check_is_stateless(&self) -> Result<()> {
        let stored = "this server stores no responses";
        if self.previous_response_id.is_some() {
            let message = format!("is not supported: {stored}; send the earlier items in input");
            return Err(Error::invalid("previous_response_id", message));
        }
        if self.background == Some(true) {
            return Err(Error::invalid("background", format!("true is not supported: {stored}; stream it instead")));
        }
        if let Some(other) = self.truncation.as_ref().filter(|value| *value != "disabled") {
            let message =
                format!("{:?} is not supported; send \"disabled\" and a shorter input", shown(other, MAX_SHOWN));
            return Err(Error::invalid("truncation", message));
        }
        if self.include.iter().flatten().any(|value| value == LOGPROBS) {
            let message = format!("{LOGPROBS} is not supported; /v1/chat/completions reports log-probabilities");
            return Err(Error::invalid("include", message));
        }
        Ok(())
    }
}

impl Echo {
    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> usize {
        let json = [&self.metadata, &self.reasoning, &self.text].map(|json| json.as_ref().map_or(0, |j| j.get().len()));
        let texts = [self.tool_choice.get(), self.tools.get(), self.instructions.as_deref().unwrap_or("")];
        json.into_iter().chain(texts.map(str::len)).sum()
    }
}

/// The functions that the model may call, as tools of a chat.
fn functions(tools: &RawValue) -> Result<Vec<ChatTool>> {
    let tool = |(i, tool): (usize, ResponseTool)| {
        if tool.r#type != "function" {
            let message = format!("{:?}: only functions are supported", shown(&tool.r#type, MAX_SHOWN));
            return Err(Error::invalid(format!("tools[{i}].type"), message));
        }
        let name = tool.name.ok_or_else(|| Error::invalid(format!("tools[{i}].name"), "is missing"))?;
        Ok(ChatTool::new(name, tool.description, tool.parameters))
    };
    typed::<Vec<ResponseTool>>("tools", tools)?.into_iter().enumerate().map(tool).collect()
}

/// The `tool_choice` of a chat: a text stays as it is.
fn choice(given: &RawValue) -> Result<Value> {
    if given.get().starts_with('{') {
        return Ok(named_tool(&typed::<NamedFunction>("tool_choice", given)?.name));
    }
    typed("tool_choice", given)
}

/// The `response_format` of a chat.
fn response_format(format: TextFormat) -> Result<Box<RawValue>> {
    match (format.r#type.as_str(), format.schema) {
        (kind @ ("text" | "json_object"), _) => raw(&json!({ "type": kind })),
        ("json_schema", Some(schema)) => schema_format(&schema),
        ("json_schema", None) => Err(Error::invalid("text.format.schema", "is missing; give a JSON schema")),
        (other, _) => {
            let message = format!("{:?} is none of text, json_object and json_schema", shown(other, MAX_SHOWN));
            Err(Error::invalid("text.format.type", message))
        }
    }
}
