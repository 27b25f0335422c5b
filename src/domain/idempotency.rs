//! Stored responses: the HTTP response of a write, replayed to whoever repeats the request.
//!
//! A stored response is a [record](super::record) that may be bound to the fingerprint of its
//! request. Giving the claim back forgets the fingerprint; a lapse keeps it. Its claim can be
//! renewed. A response can also be put without a claim.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::ids::Binding;
use super::lease::{Claim, Reference};
use super::record::{Command, Content};
use super::time::{Retention, Ttl};
use super::version::Version;

/// The length of a claim that names none, in milliseconds.
pub const DEFAULT_TTL_MS: i64 = 30_000;

/// An HTTP response, to be given again exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredResponse {
    /// All but the body.
    pub head: Head,
    /// The body's bytes; `None` if it was not stored.
    pub body: Option<Bytes>,
}

/// The part of a response before its body. Texts have one character, U+0000 to U+00FF, for each
/// octet on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// 200 to 599.
    pub status: u16,
    /// The Content-Type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// The other headers, in order, with repeats.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<(String, String)>,
}

impl Head {
    /// The most headers.
    pub const MAX_HEADERS: usize = 200;
    /// The most bytes of all headers' names and values, the Content-Type included.
    pub const MAX_BYTES: usize = 32 << 10;

    /// Checks what comes from outside.
    ///
    /// # Errors
    ///
    /// Names the member that is wrong, and says how.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        if !(200..=599).contains(&self.status) {
            return Err(("status", "must be an integer from 200 to 599".to_owned()));
        }
        if let Some(content_type) = &self.content_type {
            check_value(content_type).map_err(|message| ("content_type", message))?;
        }
        if self.headers.len() > Self::MAX_HEADERS {
            let message = format!("must be at most {}", Self::MAX_HEADERS);
            return Err(("headers", message));
        }
        for (name, value) in &self.headers {
            check_name(name)
                .and_then(|()| check_value(value))
                .map_err(|message| ("headers", format!("{name:.100}: {message}")))?;
        }
        let length = |text: &str| text.chars().count();
        let bytes = self.headers.iter().map(|(name, value)| length(name) + length(value));
        let bytes = bytes.sum::<usize>() + self.content_type.as_deref().map_or(0, length);
        if bytes > Self::MAX_BYTES {
            let message = format!("must be at most {} bytes in all, got {bytes}", Self::MAX_BYTES);
            return Err(("headers", message));
        }
        Ok(())
    }
}

/// A field name as in RFC 9110 §5.1.
fn check_name(name: &str) -> Result<(), String> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    if name.is_empty() || !name.bytes().all(is_token) {
        return Err("not a header name".to_owned());
    }
    if name.eq_ignore_ascii_case("content-type") {
        return Err("goes into content_type".to_owned());
    }
    Ok(())
}

fn check_value(value: &str) -> Result<(), String> {
    let is_octet = |c: char| u32::from(c) <= 0xff && !matches!(c, '\r' | '\n' | '\0');
    if value.chars().all(is_octet) {
        return Ok(());
    }
    Err("must have characters U+0001 to U+00FF only, and no CR or LF".to_owned())
}

impl From<StoredResponse> for Content {
    fn from(response: StoredResponse) -> Self {
        // Numbers and strings: cannot fail.
        let text = serde_json::to_string(&response.head).unwrap_or_default();
        Self { text: text.into(), body: response.body }
    }
}

impl StoredResponse {
    /// What was stored; `None` if it is not a response, which only a hand-edited row can be.
    #[must_use]
    pub fn from_content(content: &Content) -> Option<Self> {
        let head = serde_json::from_str(&content.text).ok()?;
        Some(Self { head, body: content.body.clone() })
    }
}

/// To do the write, or learn its response.
#[must_use]
pub fn claim(claim: Claim, fingerprint: Option<Binding>) -> Command {
    Command::Claim { claim, binding: fingerprint, correlation_id: None, unbinds: true }
}

/// To store the response of the write that the claim was for.
#[must_use]
pub fn complete(reference: Reference, response: StoredResponse, retention: Retention) -> Command {
    Command::Complete { reference, content: response.into(), retention: Some(retention) }
}

/// To have more time for the write.
#[must_use]
pub fn renew(reference: Reference, ttl: Option<Ttl>) -> Command {
    Command::Renew { reference, ttl }
}

/// To let another do the write.
#[must_use]
pub fn release(reference: Reference) -> Command {
    Command::Release { reference, unbinds: true }
}

/// To store a response without a claim.
#[must_use]
pub fn put(response: StoredResponse, retention: Retention) -> Command {
    Command::Put { content: response.into(), retention }
}

/// To let another do the write, whoever does now.
#[must_use]
pub fn force_release(version: Option<Version>) -> Command {
    Command::ForceRelease { version, unbinds: true }
}
