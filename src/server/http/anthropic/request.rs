//! Bodies of requests, as those of a chat.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::blocks::{InputMessage, MessageBlocks, Speaker};
use crate::error::{Error, Result, shown};
use crate::server::ServingContext;
use crate::server::http::members;
use crate::server::http::openai::chat::{
    ChatMessage, ChatPrompt, ChatRequest, ChatTool, named_tool, raw, reasoning_variables, schema_format,
};
use crate::server::http::openai::sampling::Sampling;
use crate::text::Conversation;

/// Smallest `budget_tokens`, as in Anthropic's API.
const LEAST_BUDGET: u32 = 1024;
/// Longest part of a client's text in an error.
const MAX_SHOWN: usize = 128;

members! {
    /// The body. The members that say how to sample, beside `temperature`, `top_p` and `top_k`, are those of a chat.
    pub(in crate::server::http) struct MessagesRequest {
        /// Maximum tokens of the message.
        #[schema(minimum = 1)]
        max_tokens: u32,
        /// Texts that end the message.
        stop_sequences: Vec<String>,
        ..prompt: MessagesPrompt,
        ..sampling: Sampling,
    } rejects ["container", "mcp_servers"];
}

members! {
    /// The body of `/v1/messages/count_tokens`.
    pub(in crate::server::http) struct CountRequest {
        /// The policy's name, or that of a resident adapter; all have the same tokenizer.
        pub(super) model: String,
        ..pub(super) prompt: MessagesPrompt,
    }
}

members! {
    /// The conversation.
    pub(in crate::server::http) struct MessagesPrompt {
        /// The messages so far: a `role`, and a text or a list of blocks of the types `text`, `image` (in
        /// base64), `tool_use`, `tool_result` and `thinking`.
        messages: Vec<InputMessage>,
        /// The system prompt: a text, or a list of blocks of the type `text`.
        system: MessageBlocks,
        /// Tools that the model may call.
        tools: Vec<InputTool>,
        /// Whether the model may call a tool: `{"type": "auto"}`, `any`, `none`, or `tool` with its name (default:
        /// auto).
        tool_choice: InputChoice,
        /// Whether the model is to reason, and how long at most.
        thinking: ThinkingConfig,
        /// The effort of reasoning, and the form of the text.
        output_config: OutputConfig,
        /// Further variables of the chat template.
        #[schema(value_type = Option<serde_json::Value>)]
        chat_template_kwargs: Box<RawValue>,
    }
}

/// A tool that the model may call.
#[derive(Deserialize, ToSchema)]
pub(super) struct InputTool {
    /// Only `custom`, the default: tools that Anthropic runs do not exist here.
    r#type: Option<String>,
    name: String,
    description: Option<String>,
    /// The JSON schema of the input.
    #[schema(value_type = Option<serde_json::Value>)]
    input_schema: Option<Box<RawValue>>,
}

/// Whether the model may call a tool.
#[derive(Deserialize, ToSchema)]
pub(super) struct InputChoice {
    r#type: ChoiceKind,
    name: Option<String>,
    /// Whether the answer has its first call alone.
    #[serde(default)]
    disable_parallel_tool_use: bool,
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ChoiceKind {
    Auto,
    Any,
    Tool,
    None,
}

/// Whether the model is to reason.
#[derive(Deserialize, ToSchema)]
pub(super) struct ThinkingConfig {
    /// `enabled`, `adaptive` or `disabled`.
    r#type: String,
    /// If enabled, tokens of reasoning after which `</think>` follows without a draw, below `max_tokens`.
    #[schema(minimum = 1024)]
    budget_tokens: Option<u32>,
}

/// The reasoning that [`ThinkingConfig`] asks for.
#[derive(Clone, Copy)]
enum AskedThinking {
    /// As the model likes.
    Adaptive,
    Disabled,
    Enabled {
        budget: u32,
    },
}

/// The effort of reasoning, and the form of the text.
#[derive(Deserialize, ToSchema)]
pub(super) struct OutputConfig {
    /// The variable `reasoning_effort` of the chat template.
    effort: Option<String>,
    format: Option<OutputFormat>,
}

/// The form of the text: JSON of a schema.
#[derive(Deserialize, ToSchema)]
pub(super) struct OutputFormat {
    /// Only `json_schema`.
    r#type: String,
    #[schema(value_type = serde_json::Value)]
    schema: Box<RawValue>,
}

/// Whether the model's chat template takes messages of the system after others.
pub(super) fn takes_later_system(context: &ServingContext) -> bool {
    let template = context.model.encoder.as_ref().and_then(|encoder| encoder.chat_template.as_ref());
    let messages = ["user", "system", "user"].map(|role| json!({ "role": role, "content": "a" })).to_vec();
    let later = Conversation { messages, ..Conversation::default() };
    template.is_none_or(|template| template.render(later, &context.traffic).is_ok())
}

impl MessagesRequest {
    /// The body of the chat. If the template does not take messages of the system after others, they become part of the
    /// system prompt.
    ///
    /// # Errors
    /// `InvalidArgument` for members whose values only these bodies have. Everything else is checked when the chat is.
    pub(super) fn into_chat(self, takes_later_system: impl FnOnce() -> bool) -> Result<ChatRequest> {
        let Self { max_tokens, stop_sequences, prompt, mut sampling } = self;
        let max_tokens = match max_tokens {
            Some(most @ 1..) => most,
            Some(0) => return Err(Error::invalid("max_tokens", "0 is not above 0")),
            None => return Err(Error::invalid("max_tokens", "is missing; give the maximum of the message's tokens")),
        };
        sampling.check_is_plain()?;
        if let Some(texts) = stop_sequences {
            sampling.stop.get_or_insert_default().0.extend(texts);
        }
        if let AskedThinking::Enabled { budget } = prompt.asked_thinking()? {
            if budget >= max_tokens {
                let message = format!("{budget} is not below max_tokens {max_tokens}, which the text needs too");
                return Err(Error::invalid("thinking.budget_tokens", message));
            }
            if sampling.thinking_token_budget.replace(budget.into()).is_some() {
                let message = "cannot be combined with thinking.budget_tokens; send one of them";
                return Err(Error::invalid("thinking_token_budget", message));
            }
        }
        if let Some(format) = prompt.format()?
            && sampling.response_format.replace(format).is_some()
        {
            let message = "cannot be combined with output_config.format; send one of them";
            return Err(Error::invalid("response_format", message));
        }
        let chat = prompt.into_chat(takes_later_system)?;
        Ok(ChatRequest { max_completion_tokens: Some(max_tokens), sampling, ..chat })
    }
}

impl MessagesPrompt {
    fn asked_thinking(&self) -> Result<AskedThinking> {
        self.thinking.as_ref().map_or(Ok(AskedThinking::Adaptive), ThinkingConfig::asked)
    }

    /// The `response_format` of the text, if one is asked for.
    fn format(&self) -> Result<Option<Box<RawValue>>> {
        let format = self.output_config.as_ref().and_then(|config| config.format.as_ref());
        format
            .map(|format| {
                let kind = shown(&format.r#type, MAX_SHOWN);
                if kind != "json_schema" {
                    return Err(Error::invalid("output_config.format.type", format!("{kind:?} is not json_schema")));
                }
                schema_format(&format.schema)
            })
            .transpose()
    }

    /// The prompt of the chat, with its tools.
    ///
    /// # Errors
    /// `InvalidArgument` for members whose values only these bodies have.
    pub(super) fn into_chat(self, takes_later_system: impl FnOnce() -> bool) -> Result<ChatRequest> {
        let asked = self.asked_thinking()?;
        let given = self.messages.ok_or_else(|| Error::invalid("messages", "is missing; give a list of messages"))?;
        let mut system = self.system.map_or_else(|| Ok(String::new()), |blocks| blocks.into_system("system"))?;
        let joins = given.iter().any(|message| message.role == Speaker::System) && !takes_later_system();
        let mut messages = Vec::new();
        for (i, message) in given.into_iter().enumerate() {
            let path = format!("messages[{i}]");
            if joins && message.role == Speaker::System {
                system.push_str(&message.content.into_system(&format!("{path}.content"))?);
            } else {
                message.append_to(&path, &mut messages)?;
            }
        }
        if !system.is_empty() {
            messages.insert(0, ChatMessage::new("system", vec![system.into()]));
        }
        let effort = match asked {
            AskedThinking::Disabled => Some("none".into()),
            _ => self.output_config.and_then(|config| config.effort),
        };
        let thinks = matches!(asked, AskedThinking::Enabled { .. }).then_some(true);
        let tools = self.tools.unwrap_or_default().into_iter().enumerate();
        let tools = tools.map(|(i, tool)| tool.into_chat(i)).collect::<Result<Vec<_>>>()?;
        let parallel_tool_calls = self.tool_choice.as_ref().map(|choice| !choice.disable_parallel_tool_use);
        let tool_choice = self.tool_choice.map(|choice| choice.into_chat()).transpose()?;
        let prompt = ChatPrompt {
            messages: Some(raw(&messages)?.into()),
            tools: (!tools.is_empty()).then(|| raw(&tools)).transpose()?,
            chat_template_kwargs: reasoning_variables(self.chat_template_kwargs, effort.as_deref(), thinks)?,
            ..ChatPrompt::default()
        };
        let tool_choice = tool_choice.as_ref().map(raw).transpose()?;
        Ok(ChatRequest { prompt, tool_choice, parallel_tool_calls, ..ChatRequest::default() })
    }
}

impl ThinkingConfig {
    fn asked(&self) -> Result<AskedThinking> {
        match (self.r#type.as_str(), self.budget_tokens) {
            ("disabled", _) => Ok(AskedThinking::Disabled),
            ("adaptive", _) => Ok(AskedThinking::Adaptive),
            ("enabled", Some(budget @ LEAST_BUDGET..)) => Ok(AskedThinking::Enabled { budget }),
            ("enabled", Some(budget)) => {
                let message = format!("{budget} is below {LEAST_BUDGET}; thinking_token_budget takes any number");
                Err(Error::invalid("thinking.budget_tokens", message))
            }
            ("enabled", None) => {
                Err(Error::invalid("thinking.budget_tokens", "is missing; give the maximum of the reasoning's tokens"))
            }
            (other, _) => {
                let message = format!("{:?} is none of enabled, adaptive and disabled", shown(other, MAX_SHOWN));
                Err(Error::invalid("thinking.type", message))
            }
        }
    }
}

impl InputTool {
    fn into_chat(self, i: usize) -> Result<ChatTool> {
        if let Some(kind) = self.r#type.filter(|kind| kind != "custom") {
            let message = format!("{:?}: only tools of the type custom are supported", shown(&kind, MAX_SHOWN));
            return Err(Error::invalid(format!("tools[{i}].type"), message));
        }
        if self.input_schema.is_none() {
            return Err(Error::invalid(format!("tools[{i}].input_schema"), "is missing; give a JSON schema"));
        }
        Ok(ChatTool::new(self.name, self.description, self.input_schema))
    }
}

impl InputChoice {
    fn into_chat(self) -> Result<Value> {
        Ok(match (self.r#type, self.name) {
            (ChoiceKind::Auto, _) => "auto".into(),
            (ChoiceKind::Any, _) => "required".into(),
            (ChoiceKind::None, _) => "none".into(),
            (ChoiceKind::Tool, Some(name)) => named_tool(&name),
            (ChoiceKind::Tool, None) => {
                return Err(Error::invalid("tool_choice.name", "is missing; name the tool to call"));
            }
        })
    }
}
