//! Strict reading of requests.
//!
//! A body is one JSON object, a query a list of pairs; in both, unknown members, duplicates, and
//! values that do not fit are refused, all of them named in one reply. What a member must look
//! like is said by its type's [`Field`].

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use bytes::Bytes;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tokio::time::timeout;
use uuid::Uuid;

use super::problem::{FieldError, Problem};
use crate::domain::ids::{Binding, CorrelationId, Name, OwnerId, Prefix, Reason, Scope};
use crate::domain::time::{Retention, Ttl};
use crate::domain::version::Version;

/// A request whose members are read by name.
pub(super) trait Members: Sized {
    /// The most bytes of a body.
    const MAX_BYTES: usize = 64 << 10;
    /// The name of that limit in `GET /v1/capabilities`.
    const LIMIT: &'static str = "request_body_bytes";

    /// Reads the members; `None` if any is wrong, which `fields` then knows.
    fn read(fields: &mut Fields<'_>) -> Option<Self>;
}

/// A member's type: how it looks in JSON, and in a query.
pub(super) trait Field: Sized {
    /// Whether `null` is a value, and not another way to leave the member out.
    const NULL_IS_A_VALUE: bool = false;

    /// From JSON text that is known to be well formed.
    fn from_json(json: &RawValue) -> Result<Self, String>;

    /// From the text of a query parameter.
    fn from_text(text: &str) -> Result<Self, String>;
}

enum Value<'a> {
    Json(&'a RawValue),
    Text(Cow<'a, str>),
}

/// The members of one request that were not read yet, and what was wrong so far.
pub(super) struct Fields<'a> {
    members: Vec<(Cow<'a, str>, Value<'a>)>,
    errors: Vec<FieldError>,
}

impl<'a> Fields<'a> {
    /// `name` is what to call the whole when it is not an object.
    fn from_json(body: &'a [u8], name: &str) -> Result<Self, Problem> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let members =
            RawObject::deserialize(&mut json).and_then(|object| json.end().map(|()| object));
        let RawObject(members) = members.map_err(|error| {
            if error.is_data() {
                Problem::invalid_request(vec![FieldError {
                    field: name.to_owned(),
                    message: "must be one JSON object".to_owned(),
                }])
            } else {
                Problem::invalid_json(format!("the body is not JSON: {error}"))
            }
        })?;
        let members = members.into_iter().map(|(name, raw)| (name, Value::Json(raw)));
        Ok(Self::without_duplicates(members))
    }

    fn from_query(query: &'a str) -> Self {
        let mut mistakes = Vec::new();
        let pairs = query.split('&').filter(|pair| !pair.is_empty()).filter_map(|pair| {
            let (name, text) = pair.split_once('=').unwrap_or((pair, ""));
            let decoded = percent_decode(name).zip(percent_decode(text));
            if decoded.is_none() {
                mistakes.push(name.to_owned());
            }
            decoded.map(|(name, text)| (name, Value::Text(text)))
        });
        let mut fields = Self::without_duplicates(pairs);
        for name in mistakes {
            fields.error(&name, "must be UTF-8, percent-encoded");
        }
        fields
    }

    fn without_duplicates(members: impl Iterator<Item = (Cow<'a, str>, Value<'a>)>) -> Self {
        let mut fields = Self { members: Vec::new(), errors: Vec::new() };
        for (name, value) in members {
            if fields.members.iter().any(|(known, _)| *known == name) {
                fields.error(&name, "given twice");
            } else if fields.members.len() < MAX_MEMBERS {
                fields.members.push((name, value));
            } else {
                fields.error(&name, "too many members");
                break;
            }
        }
        fields
    }

    fn error(&mut self, field: &str, message: impl Into<String>) {
        if self.errors.len() < MAX_ERRORS {
            let field = field.chars().take(100).collect();
            self.errors.push(FieldError { field, message: message.into() });
        }
    }

    fn take(&mut self, name: &str) -> Option<Value<'a>> {
        let index = self.members.iter().position(|(known, _)| known == name)?;
        Some(self.members.swap_remove(index).1)
    }

    /// A member that must be there; `None` if it is not, or is wrong.
    pub(super) fn required<T: Field>(&mut self, name: &str) -> Option<T> {
        let value = self.optional(name)?;
        if value.is_none() {
            self.error(name, "required");
        }
        value
    }

    /// A member that may be left out, or `null`; `None` if it is wrong.
    #[expect(clippy::option_option, reason = "wrong and absent are different things")]
    pub(super) fn optional<T: Field>(&mut self, name: &str) -> Option<Option<T>> {
        let parsed = match self.take(name) {
            None => return Some(None),
            Some(Value::Json(raw)) if raw.get() == "null" && !T::NULL_IS_A_VALUE => {
                return Some(None);
            }
            Some(Value::Json(raw)) => T::from_json(raw),
            Some(Value::Text(text)) => T::from_text(&text),
        };
        match parsed {
            Ok(value) => Some(Some(value)),
            Err(message) => {
                self.error(name, message);
                None
            }
        }
    }

    /// An object, read by `T`.
    pub(super) fn object<T: Members>(&mut self, name: &str) -> Option<T> {
        let Some(Value::Json(raw)) = self.take(name) else {
            self.error(name, "required: an object");
            return None;
        };
        match read::<T>(Fields::from_json(raw.get().as_bytes(), "")) {
            Ok(object) => Some(object),
            Err(problem) => {
                self.adopt(name, problem);
                None
            }
        }
    }

    /// Takes over what is wrong inside a member.
    fn adopt(&mut self, name: &str, problem: Problem) {
        for error in problem.into_errors() {
            let dot = if error.field.is_empty() { "" } else { "." };
            self.error(&format!("{name}{dot}{}", error.field), error.message);
        }
    }

    /// An array of objects, each read by `T`.
    pub(super) fn items<T: Members>(&mut self, name: &str) -> Option<Vec<T>> {
        let Some(Value::Json(raw)) = self.take(name) else {
            self.error(name, "required: an array");
            return None;
        };
        let Ok(raws) = serde_json::from_str::<Vec<&RawValue>>(raw.get()) else {
            self.error(name, "must be an array");
            return None;
        };
        if raws.is_empty() || raws.len() > MAX_ITEMS {
            self.error(name, format!("must have 1 to {MAX_ITEMS} items, got {}", raws.len()));
            return None;
        }
        let mut items = Vec::with_capacity(raws.len());
        for (index, raw) in raws.iter().enumerate() {
            match read::<T>(Fields::from_json(raw.get().as_bytes(), "")) {
                Ok(item) => items.push(item),
                Err(problem) => self.adopt(&format!("{name}[{index}]"), problem),
            }
        }
        (items.len() == raws.len()).then_some(items)
    }
}

/// Undoes the encoding of query parameters, `+` for a space included.
fn percent_decode(text: &str) -> Option<Cow<'_, str>> {
    if !text.contains(['%', '+']) {
        return Some(Cow::Borrowed(text));
    }
    let is_escape = |rest: &str| {
        let digits = rest.as_bytes().get(..2);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    if !text.split('%').skip(1).all(is_escape) {
        return None;
    }
    let spaced = text.replace('+', " ");
    let decoded = percent_encoding::percent_decode_str(&spaced).decode_utf8().ok()?;
    Some(Cow::Owned(decoded.into_owned()))
}

/// More members than any request has.
const MAX_MEMBERS: usize = 64;
/// As many errors as help.
const MAX_ERRORS: usize = 20;

fn read<T: Members>(fields: Result<Fields<'_>, Problem>) -> Result<T, Problem> {
    let mut fields = fields?;
    let request = T::read(&mut fields);
    let unknown: Vec<String> =
        fields.members.iter().map(|(name, _)| name.clone().into_owned()).collect();
    for name in unknown {
        fields.error(&name, "unknown");
    }
    match request {
        Some(request) if fields.errors.is_empty() => Ok(request),
        _ => Err(Problem::invalid_request(fields.errors)),
    }
}

/// A JSON object's members as they stand in the text.
struct RawObject<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for RawObject<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'de> Visitor<'de> for Reader {
            type Value = RawObject<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawObject<'de>, A::Error> {
                let mut members = Vec::new();
                while let Some(MemberName(name)) = map.next_key()? {
                    members.push((name, map.next_value()?));
                }
                Ok(RawObject(members))
            }
        }

        deserializer.deserialize_map(Reader)
    }
}

#[derive(Deserialize)]
struct MemberName<'a>(#[serde(borrow)] Cow<'a, str>);

/// A request without members.
pub(super) struct Nothing;

impl Members for Nothing {
    fn read(_fields: &mut Fields<'_>) -> Option<Self> {
        Some(Self)
    }
}

/// How long a body may take to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// A strict JSON body; its members do not go into the query.
pub(super) struct Strict<T>(pub(super) T);

impl<S: Sync, T: Members> FromRequest<S> for Strict<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Problem> {
        if let Some(query) = request.uri().query() {
            read::<Nothing>(Ok(Fields::from_query(query)))?;
        }
        let media_type = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let essence = media_type.map(|text| text.split(';').next().unwrap_or_default().trim());
        if !essence.is_some_and(|essence| essence.eq_ignore_ascii_case("application/json")) {
            return Err(Problem::unsupported_media_type());
        }
        // Said at once, before the sender is asked to go on.
        let declared =
            request.headers().get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
        if declared.is_some_and(|length: usize| length > T::MAX_BYTES) {
            return Err(Problem::payload_too_large(T::LIMIT, T::MAX_BYTES));
        }
        let body = read_body(request.into_body(), T::LIMIT, T::MAX_BYTES).await?;
        read(Fields::from_json(&body, "body")).map(Self)
    }
}

async fn read_body(body: Body, limit: &'static str, max: usize) -> Result<Bytes, Problem> {
    let Ok(bytes) = timeout(BODY_TIMEOUT, to_bytes(body, max)).await else {
        return Err(Problem::invalid_json("the request body did not arrive within 5 s"));
    };
    bytes.map_err(|error| {
        let is_too_large = std::error::Error::source(&error)
            .is_some_and(<dyn std::error::Error>::is::<http_body_util::LengthLimitError>);
        if is_too_large {
            Problem::payload_too_large(limit, max)
        } else {
            Problem::invalid_json("the request body broke off")
        }
    })
}

/// Strict query parameters.
pub(super) struct StrictQuery<T>(pub(super) T);

impl<S: Sync, T: Members> FromRequestParts<S> for StrictQuery<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Problem> {
        read(Ok(Fields::from_query(parts.uri.query().unwrap_or_default()))).map(Self)
    }
}

fn text(json: &RawValue) -> Result<Cow<'_, str>, String> {
    serde_json::from_str::<MemberName<'_>>(json.get())
        .map(|MemberName(text)| text)
        .map_err(|_| "must be a string of valid Unicode".to_owned())
}

macro_rules! text_field {
    ($type:ty, $parse:expr) => {
        impl Field for $type {
            fn from_json(json: &RawValue) -> Result<Self, String> {
                Self::from_text(&text(json)?)
            }

            fn from_text(text: &str) -> Result<Self, String> {
                $parse(text)
            }
        }
    };
}

macro_rules! name_fields {
    ($($type:ty),*) => {
        $( text_field!($type, |text: &str| Self::new(text).map_err(|error| error.to_string())); )*
    };
}

name_fields!(Name, OwnerId, Prefix, Reason, Scope, Binding, CorrelationId);
text_field!(Uuid, |text: &str| {
    // The library reads other spellings, too; one identity should have one.
    let parsed = if text.len() == 36 { Self::try_parse(text).ok() } else { None };
    parsed.ok_or_else(|| "must be a UUID such as 0198f2c4-7d1e-7c3a-9b1f-3d2a6c5e4f00".to_owned())
});

fn integer(text: &str, min: i64, max: i64) -> Result<i64, String> {
    let is_bare = text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    let number: Option<i64> = serde_json::from_str(text).ok().filter(|_| is_bare);
    number
        .filter(|number| (min..=max).contains(number))
        .ok_or_else(|| format!("must be an integer from {min} to {max}"))
}

macro_rules! integer_field {
    ($type:ty, $min:expr, $max:expr, $make:expr) => {
        impl Field for $type {
            fn from_json(json: &RawValue) -> Result<Self, String> {
                Self::from_text(json.get())
            }

            fn from_text(text: &str) -> Result<Self, String> {
                $make(integer(text, $min, $max)?).ok_or_else(|| "out of range".to_owned())
            }
        }
    };
}

/// How long a call may wait, in milliseconds.
#[derive(Clone, Copy)]
pub(super) struct WaitMs(pub(super) u32);

impl WaitMs {
    /// Below the minute after which proxies commonly give up.
    pub(super) const MAX: u32 = 50_000;
}

/// How many items a list may have.
#[derive(Clone, Copy)]
pub(super) struct Limit(pub(super) u32);

impl Limit {
    pub(super) const MAX: u32 = 1_000;
    pub(super) const DEFAULT: Self = Self(100);
}

integer_field!(Ttl, Self::MIN_MS, Self::MAX_MS, Self::from_millis);
integer_field!(Retention, Self::MIN_MS, Self::MAX_MS, Self::from_millis);
integer_field!(Version, 1, Self::MAX, Self::new);
integer_field!(WaitMs, 0, i64::from(Self::MAX), |ms| u32::try_from(ms).ok().map(Self));
integer_field!(Limit, 1, i64::from(Self::MAX), |n| u32::try_from(n).ok().map(Self));

/// Any JSON value, kept as its text.
pub(super) struct AnyJson(pub(super) Arc<str>);

impl Field for AnyJson {
    const NULL_IS_A_VALUE: bool = true;

    fn from_json(json: &RawValue) -> Result<Self, String> {
        Ok(Self(json.get().into()))
    }

    fn from_text(_text: &str) -> Result<Self, String> {
        Err("must be JSON".to_owned())
    }
}

/// A JSON object of strings, kept as its text.
pub(super) struct Metadata(pub(super) String);

impl Metadata {
    pub(super) const MAX_BYTES: usize = 4 << 10;
}

impl Field for Metadata {
    fn from_json(json: &RawValue) -> Result<Self, String> {
        let wrong = || "must be a JSON object of strings".to_owned();
        let RawObject(members) = serde_json::from_str(json.get()).map_err(|_| wrong())?;
        let mut texts = serde_json::Map::new();
        for (name, raw) in members {
            let text = text(raw).map_err(|_| wrong())?;
            if let Some((name, _)) = texts.get_key_value(&*name) {
                return Err(format!("{name:.100} is given twice"));
            }
            texts.insert(name.into_owned(), text.into());
        }
        let encoded = serde_json::Value::from(texts).to_string();
        if encoded.len() > Self::MAX_BYTES {
            let (max, got) = (Self::MAX_BYTES, encoded.len());
            return Err(format!("must be at most {max} bytes as compact JSON, got {got}"));
        }
        Ok(Self(encoded))
    }

    fn from_text(_text: &str) -> Result<Self, String> {
        Err("must be a JSON object".to_owned())
    }
}

/// A member that must be there.
pub(super) type Required<T> = T;
/// A member that may be left out.
pub(super) type Optional<T> = Option<T>;
/// A member that is an array of 1 to [`MAX_ITEMS`] objects.
pub(super) type Items<T> = Vec<T>;

/// A member that is an object.
pub(super) type Object<T> = T;

/// The most items of a `-many` call.
pub(super) const MAX_ITEMS: usize = 1_000;

/// Defines a request: its members once, for reading and for the OpenAPI document. `body` and
/// `query` say where the members are; `as` says how a member's type is told in the document.
macro_rules! request {
    (
        $(#[$doc:meta])*
        body $name:ident $(max $max:ident)? {
            $( $(#[$member_doc:meta])*
               $member:ident: $presence:ident<$type:ident> as $schema:ty, )*
        }
    ) => {
        $(#[$doc])*
        #[derive(utoipa::ToSchema)]
        pub(super) struct $name {
            $( $(#[$member_doc])* #[schema(value_type = $schema)] $member: $presence<$type>, )*
        }
        request!(@read $name $($max)?; $($presence $member)*);
    };
    (
        $(#[$doc:meta])*
        query $name:ident {
            $( $(#[$member_doc:meta])*
               $member:ident: $presence:ident<$type:ident> as $schema:ty, )*
        }
    ) => {
        $(#[$doc])*
        #[derive(utoipa::IntoParams)]
        #[into_params(parameter_in = Query)]
        pub(super) struct $name {
            $( $(#[$member_doc])* #[param(value_type = $schema)] $member: $presence<$type>, )*
        }
        request!(@read $name; $($presence $member)*);
    };
    (@read $name:ident $($max:ident)?; $($presence:ident $member:ident)*) => {
        impl $crate::http::request::Members for $name {
            $(
                const MAX_BYTES: usize = $max.1;
                const LIMIT: &'static str = $max.0;
            )?

            fn read(fields: &mut $crate::http::request::Fields<'_>) -> Option<Self> {
                // Every member is read before any is given up on, so that all errors are named.
                $( let $member = request!(@member $presence fields $member); )*
                Some(Self { $( $member: $member?, )* })
            }
        }
    };
    (@member Required $fields:ident $member:ident) => {
        $fields.required(stringify!($member))
    };
    (@member Optional $fields:ident $member:ident) => {
        $fields.optional(stringify!($member))
    };
    (@member Object $fields:ident $member:ident) => { $fields.object(stringify!($member)) };
    (@member Items $fields:ident $member:ident) => { $fields.items(stringify!($member)) };
}
pub(super) use request;

#[cfg(test)]
mod tests {
    use super::*;

    request! {
        /// For these tests.
        body Sample {
            key: Required<Name> as String,
            ttl_ms: Optional<Ttl> as Option<i64>,
        }
    }

    fn errors(body: &str) -> Vec<String> {
        match read::<Sample>(Fields::from_json(body.as_bytes(), "body")) {
            Ok(Sample { key, ttl_ms }) => {
                assert!(!key.as_str().is_empty() && ttl_ms.is_none_or(|ttl| ttl.as_millis() > 0));
                Vec::new()
            }
            Err(problem) => {
                let code = problem.code();
                let errors = problem.into_errors().into_iter();
                let fields: Vec<String> = errors.map(|error| error.field).collect();
                if fields.is_empty() { vec![code.to_owned()] } else { fields }
            }
        }
    }

    #[test]
    fn every_wrong_member_is_named() {
        assert_eq!(errors(r#"{"ttl_ms":1.0,"other":1}"#), ["key", "ttl_ms", "other"]);
        assert_eq!(errors(r#"{"key":"a","key":"a"}"#), ["key"]);
        assert_eq!(errors(r#"{"key":7,"ttl_ms":"500"}"#), ["key", "ttl_ms"]);
    }

    #[test]
    fn zero_is_a_value_and_null_is_absent() {
        assert_eq!(errors(r#"{"key":"a","ttl_ms":0}"#), ["ttl_ms"]);
        assert!(errors(r#"{"key":"a","ttl_ms":null}"#).is_empty());
        assert_eq!(errors(r#"{"key":null}"#), ["key"]);
    }

    #[test]
    fn numbers_that_are_not_integers_in_range_are_refused() {
        for number in ["-0", "1e3", "1.0", "99", "86400001", "18446744073709551616", "true"] {
            assert_eq!(errors(&format!(r#"{{"key":"a","ttl_ms":{number}}}"#)), ["ttl_ms"]);
        }
    }

    #[test]
    fn what_is_not_one_json_object_is_refused() {
        for body in ["", "{", "{}{}", "{\"key\":\"\\ud800\"", "\u{feff}{}"] {
            assert_eq!(errors(body), ["invalid_json"], "{body}");
        }
        for body in ["[]", "1", "null"] {
            assert_eq!(errors(body), ["body"], "{body}");
        }
        let deep = "[".repeat(30_000) + &"]".repeat(30_000);
        assert_eq!(errors(&format!(r#"{{"key":{deep}}}"#)), ["key"]);
    }
}
