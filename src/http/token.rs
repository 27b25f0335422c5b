//! Page tokens: where a list goes on, opaque to callers.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::value::RawValue;

use super::request::Field;
use crate::domain::ids::Name;

/// The last name of the page before.
pub(super) struct PageToken(pub(super) Name);

impl fmt::Display for PageToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&URL_SAFE_NO_PAD.encode(self.0.as_str()))
    }
}

impl Field for PageToken {
    fn from_json(_json: &RawValue) -> Result<Self, String> {
        Err("must be a query parameter".to_owned())
    }

    fn from_text(text: &str) -> Result<Self, String> {
        let name = URL_SAFE_NO_PAD.decode(text).ok().and_then(|name| String::from_utf8(name).ok());
        name.and_then(|name| Name::new(name).ok())
            .map(Self)
            .ok_or_else(|| "must be the next_page_token of an earlier reply".to_owned())
    }
}
