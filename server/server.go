// Package server is HTTP in: routes, decoding, answers. It knows no SQL and no channel; what a request means is admit's
// business, and what becomes of it is the store's.
package server

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"math"
	"net/http"
	"reflect"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humachi"
	"github.com/go-chi/chi/v5"
	strict "github.com/go-json-experiment/json"

	"tidings/internal/admit"
	"tidings/internal/explain"
	"tidings/internal/metrics"
	"tidings/store"
)

// Config is what a server works with.
type Config struct {
	Store   *store.Store
	Admit   *admit.Admitter
	Review  bool // new versions of templates wait for an admin
	Version string
	Log     *slog.Logger
	// Health, when set, tells how lanes, channels and providers are, for /readyz?verbose.
	Health func() any
	// Provider, when set, tells whether there is a provider of a name.
	Provider func(name string) bool
	// Explain tells why tasks are where they are, and knows the channels' providers and the tasks' policies.
	Explain *explain.Explainer
	// Metrics, when set, counts requests and is shown at /metrics.
	Metrics *metrics.Metrics
}

// Server answers HTTP requests. It is an http.Handler, safe for concurrent use.
type Server struct {
	cfg     Config
	handler http.Handler
	decoder *decoder
}

// Limits of the listener and of requests.
const (
	maxBody       = 1 << 20
	readHeader    = 10 * time.Second
	bodyTimeLimit = 30 * time.Second
	maxWait       = 60 * time.Second
	writeTime     = maxWait + 30*time.Second
	idleTime      = 2 * time.Minute
	maxHeader     = 32 << 10
)

// New makes a server.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: cfg}
	for _, f := range failures {
		cfg.Metrics.Rejections(f.code)
	}
	router := chi.NewMux()
	router.Use(s.observe, sameOrigin, s.authenticate)
	router.NotFound(func(w http.ResponseWriter, _ *http.Request) { writeProblem(w, notFound) })
	router.MethodNotAllowed(func(w http.ResponseWriter, _ *http.Request) { writeProblem(w, wrongMethod) })
	s.routes(humachi.New(router, s.apiConfig()))
	router.Post("/api/messages/bulk", s.bulk)
	router.Mount("/docs", docs())
	if cfg.Metrics != nil {
		router.Method(http.MethodGet, "/metrics", cfg.Metrics.Handler())
	}
	s.handler = router
	return s
}

// ServeHTTP answers a request.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Listener is an http.Server around the handler, with limits for slow and oversized requests.
func (s *Server) Listener() *http.Server {
	return &http.Server{
		Handler: s, ReadHeaderTimeout: readHeader, WriteTimeout: writeTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
	}
}

func (s *Server) routes(api huma.API) {
	s.decoder = newDecoder(api.OpenAPI().Components.Schemas)
	huma.Register(api, huma.Operation{
		OperationID: "send-message", Method: http.MethodPost, Path: "/api/messages", Summary: "Send a message",
		Description: "Accepts a message. 202 says that it is stored and will be sent; 200 that it was known already.",
		Tags:        []string{"messages"}, DefaultStatus: http.StatusAccepted, MaxBodyBytes: maxBody + 1, BodyReadTimeout: bodyTimeLimit,
		SkipValidateBody: true, // send does it, to name faults of the schema and of admission together
		Responses: map[string]*huma.Response{
			"202": {Description: "Accepted", Content: contentOf[Sent](api)},
			"200": {Description: "The request_id was known, with the same body; or, with dry_run, what would have come of the request", Content: contentOf[Sent](api, reflect.TypeFor[DryRun]())},
		},
		RequestBody: &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{"application/json": {Schema: s.decoder.schema}}},
	}, s.send)
	huma.Register(api, huma.Operation{
		OperationID: "get-message", Method: http.MethodGet, Path: "/api/messages/{id}", Summary: "Ask for a message",
		Tags: []string{"messages"},
	}, s.message)
	op := operation("messages", "explain-message", http.MethodGet, "/api/messages/{id}/explain", "Tell why each task of a message is where it is, and what happens next")
	op.Description = "A plain sentence for each task, with the rows that say so."
	huma.Register(api, op, s.explain)
	huma.Register(api, huma.Operation{
		OperationID: "list-messages", Method: http.MethodGet, Path: "/api/messages", Summary: "List messages, or find the one of a request_id",
		Tags: []string{"messages"},
	}, s.list)
	s.scheduleRoutes(api)
	s.batchRoutes(api)
	s.bulkRoute(api)
	s.quotaRoutes(api)
	s.laneRoutes(api)
	s.deadRoutes(api)
	s.statsRoute(api)
	s.templateRoutes(api)
	s.sourceRoutes(api)
	huma.Register(api, huma.Operation{
		OperationID: "live", Method: http.MethodGet, Path: "/livez", Summary: "Is the process alive?", Tags: []string{"health"},
	}, s.live)
	huma.Register(api, huma.Operation{
		OperationID: "ready", Method: http.MethodGet, Path: "/readyz", Summary: "Can it accept messages?", Tags: []string{"health"},
	}, s.ready)
}

// operation describes a route that is none of the hot ones.
func operation(tag, id, method, path, summary string) huma.Operation {
	return huma.Operation{OperationID: id, Method: method, Path: path, Summary: summary, Tags: []string{tag}, MaxBodyBytes: maxBody, BodyReadTimeout: bodyTimeLimit}
}

// pageBefore reads the cursor of a list that goes down by id.
func pageBefore(cursor string) (uint64, error) {
	if cursor == "" {
		return math.MaxInt64, nil
	}
	id, err := strconv.ParseUint(cursor, 10, 63)
	if err != nil || id == 0 {
		return 0, faulty([]admit.Problem{{Field: "cursor", Code: admit.CodeInvalid, Message: "is no next_cursor of a page"}})
	}
	return id, nil
}

func contentOf[T any](api huma.API, others ...reflect.Type) map[string]*huma.MediaType {
	schema := api.OpenAPI().Components.Schemas.Schema(reflect.TypeFor[T](), true, "")
	if len(others) > 0 {
		schema = &huma.Schema{OneOf: []*huma.Schema{schema}}
		for _, other := range others {
			schema.OneOf = append(schema.OneOf, api.OpenAPI().Components.Schemas.Schema(other, true, ""))
		}
	}
	return map[string]*huma.MediaType{"application/json": {Schema: schema}}
}

// apiConfig is huma's configuration without its documentation page, which loads code from elsewhere, and without the links
// that it would add to every answer.
func (s *Server) apiConfig() huma.Config {
	return huma.Config{
		OpenAPI: &huma.OpenAPI{
			OpenAPI:    "3.1.0",
			Info:       &huma.Info{Title: "Tidings", Version: s.cfg.Version, Description: "A message centre on MySQL."},
			Components: &huma.Components{Schemas: huma.NewMapRegistry("#/components/schemas/", huma.DefaultSchemaNamer)},
		},
		OpenAPIPath:                  "/openapi",
		Formats:                      map[string]huma.Format{"application/json": jsonFormat, "json": jsonFormat},
		DefaultFormat:                "application/json",
		RejectUnknownQueryParameters: true,
	}
}

var jsonFormat = huma.Format{
	Marshal: func(w io.Writer, v any) error {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		return enc.Encode(v)
	},
	Unmarshal: func(data []byte, v any) error {
		if err := strict.Unmarshal(data, new(any)); err != nil { // repeated names, trailing text, bad UTF-8
			return err
		}
		return json.Unmarshal(data, v)
	},
}

type health struct {
	Body struct {
		Status string `json:"status" doc:"ok, or what is missing."`
	}
}

func (s *Server) live(context.Context, *struct{}) (*health, error) {
	var h health
	h.Body.Status = "ok"
	return &h, nil
}

type readyInput struct {
	Verbose string `query:"verbose" doc:"Any value but false: how lanes, channels and providers are, too."`
	verbose bool
}

// Resolve tells ?verbose without a value, which is true, from none.
func (in *readyInput) Resolve(ctx huma.Context) []error {
	url := ctx.URL()
	in.verbose = url.Query().Has("verbose") && in.Verbose != "false"
	return nil
}

type readyOutput struct {
	Body struct {
		Status string `json:"status" doc:"ok, or what is missing."`
		Health any    `json:"health,omitempty" doc:"With verbose: lanes, channels and providers, as this process finds them."`
	}
}

func (s *Server) ready(ctx context.Context, in *readyInput) (*readyOutput, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := s.cfg.Store.Ping(ctx); err != nil {
		return nil, unavailable.problem()
	}
	var h readyOutput
	h.Body.Status = "ok"
	if s.cfg.Health != nil && in.verbose {
		h.Body.Health = s.cfg.Health()
	}
	return &h, nil
}
