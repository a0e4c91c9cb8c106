package server

import (
	"net/http"

	"github.com/swaggest/swgui"
	"github.com/swaggest/swgui/v5emb"
)

// docs is a viewer of the API's description. All of it is in the binary: it loads nothing from elsewhere.
func docs() http.Handler {
	viewer := v5emb.NewHandlerWithConfig(swgui.Config{Title: "Tidings", SwaggerJSON: "/openapi.json", BasePath: "/docs", HideCurl: false, SettingsUI: map[string]string{"validatorUrl": "null"}})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:")
		viewer.ServeHTTP(w, r)
	})
}
